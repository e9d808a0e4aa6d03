"""Build hook: a wheel carries templates and csrc inside the package; a checkout (editable install) reads them at its top."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["force_include"] |= {name: f"replayssm_jit/{name}" for name in ("templates", "csrc")}
