"""Model families: Hugging Face architectures that megascale trains, one file each, declared as data."""
