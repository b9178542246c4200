"""LayerSkip: exits of a model that was trained with dropped blocks."""
