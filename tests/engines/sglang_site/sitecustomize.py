"""A stand-in for torchvision, first on the path of an SGLang server that serves text only and has none.

It is offered only after transformers has looked for the real one, so that transformers knows that there is none.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

_LOOKED_FOR = "transformers.models.auto.image_processing_auto"


def _anything(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] != "torchvision" or _LOOKED_FOR not in sys.modules:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _anything
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_StandIn())
