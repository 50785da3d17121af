"""The HLIR is ONNX itself: load and check a model, bring it to one opset, build nodes, save it."""
