"""The lint rules, a file for each subject; `registry.all_rules` loads them."""
