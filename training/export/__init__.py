"""Export: ONNX files, calibration, model cards and packs."""
