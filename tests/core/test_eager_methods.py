"""The methods that torch.compile leaves alone are marked without Dynamo, and disabled in time."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from shoal.core.eager_methods import eager, keep_eager


def test_a_marked_method_is_ordinary_until_a_model_is_parallelised() -> None:
    class Child:
        @eager
        def marked(self) -> int:
            return 1

    plain = vars(Child)["marked"]
    assert not hasattr(plain, "_torchdynamo_disable") and Child().marked() == 1
    keep_eager()
    disabled = vars(Child)["marked"]
    assert disabled._torchdynamo_disable and Child().marked() == 1
    keep_eager()
    assert vars(Child)["marked"] is disabled, "disabled once"


def test_of_a_compiled_function_it_is_no_part() -> None:
    seen = []

    class Looks:
        @eager
        def look(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.compiler.is_compiling())
            return x + 1

    keep_eager()
    compiled = torch.compile(lambda x: Looks().look(2 * x), backend="eager")
    assert compiled(torch.ones(())).item() == 3 and seen == [False]


@pytest.mark.processes
def test_the_command_line_does_not_import_what_takes_a_second() -> None:
    heavy = ["torch._dynamo", "torch.distributed.fsdp", "sympy"]
    found = f"[name for name in {heavy} if name in sys.modules]"
    code = f"import shoal_tools.cli, sys; sys.exit(str({found}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "[]\n"
