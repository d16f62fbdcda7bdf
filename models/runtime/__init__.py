"""Inference runtimes: ONNX Runtime, OpenVINO and CUDA."""
