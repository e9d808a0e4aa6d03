"""Module description -> source text, and the digest that notices every edit."""

import os

import pytest
from jit_helpers import PARAMS, module

from replayssm_jit import jit
from replayssm_jit.jit import render


def test_source_is_whole_and_says_what_it_is(home):
    source = render.render(module("cpu", 7))
    assert source.startswith("// add_7, rendered from templates/cpu/add\n// addend=7\n")
    assert "struct Params {\n  void* input;\n  void* output;\n  int count;\n};" in source
    assert "inline int plus" in source
    assert ", 7);" in source
    assert "{%" not in source
    assert "{{" not in source


def test_includes_come_from_templates_backend_and_csrc(home):
    source = render.render(module("cuda", 7))
    assert "#define inline __device__ inline" in source
    assert "inline int plus" in source


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{% include 'no.h' %}", "no.h"),
        ("\n{% if %}", "bad.cpp.jinja:2"),
        (None, "bad.cpp.jinja"),
    ],
)
def test_a_bad_template_names_itself(home, text, told):
    if text is not None:
        (home / "templates/cpu/bad.cpp.jinja").write_text(text)
    with pytest.raises(jit.TemplateError, match="add_1: template cpu/bad: ") as raised:
        jit.compile(module("cpu", template="bad"))
    assert told in str(raised.value)


def test_digest_is_of_content_not_of_times(home):
    def digest(backend):
        render.digest.cache_clear()
        return render.digest(backend)

    before = digest("cpu"), digest("cuda")
    path = home / "csrc/plus.h"
    status = path.stat()
    os.utime(path, (1, 1))
    assert (digest("cpu"), digest("cuda")) == before
    path.write_text(path.read_text().replace("a + b", "b + a"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest("cpu") != before[0]
    assert digest("cuda") != before[1]


def test_digest_covers_names_new_files_and_its_backend_only(home):
    def digest(backend):
        render.digest.cache_clear()
        return render.digest(backend)

    cpu, cuda = digest("cpu"), digest("cuda")
    (home / "templates/cuda/new.jinja").write_text("")
    assert digest("cpu") == cpu
    assert digest("cuda") != cuda
    (home / "csrc/plus.h").rename(home / "csrc/minus.h")
    assert digest("cpu") != cpu


def test_real_templates_are_found():
    templates, csrc = render.source_dirs()
    assert os.path.isdir(os.path.join(templates, "cpu"))
    assert os.path.isdir(csrc)


def test_module_description():
    one, two = module("cpu", 1), module("cpu", 1)
    assert one == two
    assert hash(one) == hash(two)
    assert one.digest == two.digest
    others = [
        module("cpu", 2),
        module("cuda", 1),
        module("cpu", 1, "other"),
        jit.ModuleSpec("add_1", "cpu/add", "cpu", jit.ParamStruct.of(ptr=("input", "output"), i64=("count",)), (("addend", 1),)),
        jit.ModuleSpec("add_2", "cpu/add", "cpu", PARAMS, (("addend", 1),)),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 1 + len(others)
