"""Export: ONNX files, quantization, calibration, model cards and packs."""
