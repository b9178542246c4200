"""Buddy checkpoints: what turns a base model into a routed one. Safetensors and JSON only.

    buddy.json            format, base model and its fingerprint, configs, policy, files
    routing.safetensors   weights of router, predictor and ledger, and the prior
    README.md             the model card (if any)
    adapter/              LoRA weights, as PEFT writes them (if any)
    backbone/             the base model's weights (only if they cannot be loaded from elsewhere)

Every file's size and SHA-256 stand in buddy.json and are checked before anything is used. A file
that could be read and is not listed there is refused.
"""
