"""Module description -> one self-contained source text. The only file that needs Jinja, and it imports it on a cold start only."""

from __future__ import annotations

import hashlib
import os
from functools import cache

from .errors import TemplateError
from .module import ModuleSpec

SUFFIXES = {"cuda": ".cu", "cpu": ".cpp"}


@cache
def source_dirs() -> tuple[str, str]:
    """The directories ``templates`` and ``csrc``: inside the package in a wheel, beside it in a source tree."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for home in (package, os.path.dirname(package)):
        if os.path.isdir(os.path.join(home, "templates")):
            return os.path.join(home, "templates"), os.path.join(home, "csrc")
    raise TemplateError(f"no templates directory in {package} or beside it: the installation is incomplete")


@cache
def digest(backend: str) -> str:
    """Digest of every file that a module of this backend may include, by content.

    It is part of the key of a compiled module, so that an edited template or header is always noticed.
    """
    templates, csrc = source_dirs()
    total = hashlib.sha256()
    for root in (os.path.join(templates, backend), csrc):
        for path in sorted(_files(root)):
            with open(path, "rb") as file:
                content = file.read()
            total.update(f"{os.path.relpath(path, root)}\0{len(content)}\0".encode())
            total.update(content)
    return total.hexdigest()


def _files(root: str) -> list[str]:
    found: list[str] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                if entry.is_dir():
                    found += _files(entry.path)
                else:
                    found.append(entry.path)
    except FileNotFoundError:
        pass
    return found


def render(module: ModuleSpec) -> str:
    """Render the source of a module.

    Raises
    ------
    TemplateError
        The template does not exist, is malformed, or uses a name that the module does not define.
    """
    import jinja2

    templates, csrc = source_dirs()
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([templates, os.path.join(templates, module.backend), csrc]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    try:
        template = environment.get_template(f"{module.template}{SUFFIXES[module.backend]}.jinja")
        body = template.render(**dict(module.constants), params_struct=module.params.c_source)
    except jinja2.TemplateError as error:
        where = f", {error.name}:{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        raise TemplateError(f"{module.name}: template {module.template}: {type(error).__name__}: {error}{where}") from error
    constants = " ".join(f"{name}={value}" for name, value in module.constants)
    return f"// {module.name}, rendered from templates/{module.template}\n// {constants}\n{body}"
