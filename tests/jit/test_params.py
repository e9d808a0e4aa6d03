"""One declaration, two layouts: what Python packs is what C reads."""

import ctypes

import pytest

from replayssm_jit import jit


def test_c_reads_what_python_packs(home):
    params = jit.ParamStruct.of(ptr=("target",), i64=("a",), i32=("b", "c"), f32=("d",))
    assert params.size == 32  # trailing padding included
    (home / "templates/cpu/echo.cpp.jinja").write_text("""{{ params_struct }}
extern "C" void kernel(const Params* p) {
  double* out = (double*)p->target;
  out[0] = (double)p->a; out[1] = p->b; out[2] = p->c; out[3] = p->d;
}
""")
    kernel = jit.load(jit.ModuleSpec("echo", "cpu/echo", "cpu", params, ()))
    target = (ctypes.c_double * 4)()
    buffer = params.buffer()
    params.pack(buffer, target=ctypes.addressof(target), a=-(2**40), b=-7, c=2**31 - 1, d=0.5)
    kernel.launch(ctypes.addressof(buffer))
    assert list(target) == [-(2.0**40), -7.0, 2.0**31 - 1, 0.5]
    params.pack(buffer, target=ctypes.addressof(target))
    kernel.launch(ctypes.addressof(buffer))
    assert list(target) == [0.0] * 4
    assert [(row["name"], row["offset"]) for row in params.layout()] == [("target", 0), ("a", 8), ("b", 16), ("c", 20), ("d", 24)]


def test_wrong_names():
    with pytest.raises(ValueError, match="unique"):
        jit.ParamStruct.of(ptr=("x",), i32=("x",))
    params = jit.ParamStruct.of(i32=("x",))
    with pytest.raises(TypeError, match="unknown parameters \\['y'\\]"):
        params.pack(params.buffer(), y=1)


def test_a_struct_that_differs_does_not_compile(home, monkeypatch):
    params = jit.ParamStruct.of(i32=("x",))
    monkeypatch.setitem(params.__dict__, "c_source", params.c_source.replace("int x;", "long long x;").replace("== 8", "== 4"))
    (home / "templates/cpu/bad.cpp.jinja").write_text('{{ params_struct }}\nextern "C" void kernel(const Params*) {}\n')
    with pytest.raises(jit.CompileError, match="packing differs"):
        jit.compile(jit.ModuleSpec("bad", "cpu/bad", "cpu", params, ()))
