"""The engine of a run: the LightningModule, gradients, schedules, metrics, memory."""
