"""How a command gets to run once a rank: one file each.

The package is also called `shoal.launch`, its older name. `shoal.launch` is a function today, and
Python puts a package that is imported by that name in the function's place. So the package can be
called, and does as the function does. Guarded by tests/test_moved.py.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, final

from shoal.front.launch import launch


@final
class _CallablePackage(ModuleType):
    """A package that stands in for a function of the same name."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Run a function once a rank: see `shoal.launch`."""
        return launch(*args, **options)


sys.modules[__name__].__class__ = _CallablePackage
