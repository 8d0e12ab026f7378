"""Parts of transformer blocks, each with all that is computed from it."""
