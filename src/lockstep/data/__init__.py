"""Data sets, the sampler, the loaders and the datamodule."""
