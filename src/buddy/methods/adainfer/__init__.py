"""AdaInfer: classifiers that leave a model early."""
