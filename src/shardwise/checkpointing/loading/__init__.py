"""One load: match names, plan what goes where, put it there, and refuse to run on what is damaged."""
