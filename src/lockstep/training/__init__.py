"""The training engine: the LightningModule, gradients, schedules, metrics, memory."""
