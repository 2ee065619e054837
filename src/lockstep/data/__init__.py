"""Data: stores of uint8 images (no torch), the sampler (pure arithmetic), the datamodule."""
