"""The paper's learned parts: KV-aware Planner, Decision Module, prior."""
