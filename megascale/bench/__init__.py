"""What a machine attains, measured."""
