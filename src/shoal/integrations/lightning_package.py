"""The package of Lightning that the program uses: it has two names."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from shoal.contracts.versions import install_shoal
from shoal.core.errors import UsageError
from shoal.integrations.checks import check_version

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def installed() -> ModuleType:
    """Return the package that the program uses, or the one that is installed (UsageError)."""
    names = [name for name in _PACKAGES if name in sys.modules]
    names = names or [name for name in _PACKAGES if find_spec(name.partition(".")[0])]
    if not names:
        raise UsageError(
            "shoal.integrations.lightning needs Lightning, which is not installed",
            do=f"pip install pytorch-lightning; or, {install_shoal('lightning')}",
        )
    package = import_module(names[0])
    name = names[0].partition(".")[0].replace("_", "-")
    check_version(name, package.__version__, (2, 6), (3,))
    return package


pl = installed()
DDPStrategy = import_module(f"{pl.__name__}.strategies.ddp").DDPStrategy
distributed = import_module(f"{pl.__name__}.overrides.distributed")
