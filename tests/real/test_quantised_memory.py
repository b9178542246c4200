"""A quantised model is never held in bfloat16 beside its copy."""

import json
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel's account of memory is Linux's"),
]

LOAD = """
import gc, json, resource, sys
import torch, transformers.models.llama.modeling_llama, buddy.checkpoint.load
from buddy import BuddyForCausalLM
peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.randn(64, 64) @ torch.randn(64, 64)
BuddyForCausalLM.outline(sys.argv[1])  # imports what any loading does
before = peak()
options = {"quant": sys.argv[2], "device": "cpu", "merge_adapter": True}
model = BuddyForCausalLM.from_pretrained(sys.argv[1], **options)
tensors = {t.data_ptr(): t.nbytes for t in (*model.model.parameters(), *model.model.buffers())}
print(json.dumps([peak() - before, sum(tensors.values())]))
"""


@pytest.mark.parametrize("quant", ["int8", "int4"])
@pytest.mark.parametrize("model", ["smollm2-135m", "smollm2-135m-buddy"])
def test_the_peak_of_loading_is_near_what_stays(model, quant):
    command = [sys.executable, "-c", LOAD, model, quant]
    peak, stays = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert peak <= 1.15 * stays + 30e6  # and modules that are imported on the way
