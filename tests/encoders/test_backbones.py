from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch
from kedge.encoders.backbones import import_lazily

disable = torch.compiler.disable
timm = import_lazily("timm")
assert "torch._dynamo" not in sys.modules and "torch._dynamo.utils" not in sys.modules
assert torch.compiler.disable is disable and import_lazily("timm") is timm
network = timm.create_model("resnet10t", num_classes=0).eval()
from torchvision.ops import roi_align
stand_in = sys.modules[roi_align.__module__].is_compile_supported
answer = stand_in("cpu")
from torch._dynamo.utils import is_compile_supported
assert stand_in is not is_compile_supported and answer == is_compile_supported("cpu")
"""


def test_timm_and_torchvision_are_imported_without_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert not done.returncode, done.stderr
