"""The codemod: rewrite FSDP1 programs to FSDP2; never imports torch."""
