"""Settings of other systems, with the settings here that mean the same: for answers and docs/from-megatron.md."""
