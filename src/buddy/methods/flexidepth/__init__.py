"""FlexiDepth: routers and adapters of a frozen model."""
