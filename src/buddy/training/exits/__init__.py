"""Training of the methods that leave a model early: LayerSkip and AdaInfer."""
