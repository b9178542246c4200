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
import torch, transformers.models.llama.modeling_llama
from buddy import BuddyForCausalLM
peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.randn(64, 64) @ torch.randn(64, 64)
before = peak()
model = BuddyForCausalLM.from_pretrained("smollm2-135m", quant=sys.argv[1], device="cpu")
tensors = {t.data_ptr(): t.nbytes for t in (*model.model.parameters(), *model.model.buffers())}
print(json.dumps([peak() - before, sum(tensors.values())]))
"""


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_the_peak_of_loading_is_near_what_stays(quant):
    command = [sys.executable, "-c", LOAD, quant]
    peak, stays = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    assert peak <= 1.5 * stays  # 4.0 and 4.7 when the whole model was loaded first
