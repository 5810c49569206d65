"""Metrics of a run sent to TensorBoard, W&B, MLflow, Comet or Trackio, continued after a restart."""
