"""The process that `kernel_source` starts: imports a module and compiles one of its kernels.

python -m flashdig.evidence.kernel_worker FOLDER
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from flashdig.evidence.kernel_source import ArgumentType, KernelRequest, request_from
from flashdig.evidence.offline import ptxas_options, read_cubin
from flashdig.evidence.offline_worker import OfflineDriver
from flashdig.hardware.names import nearest


class RequestError(ValueError):
    """The request does not fit the kernel; the message is for whoever typed it."""


def load_module(name: str) -> ModuleType:
    """A module by dotted name or file; a file of a package is imported as a part of it."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    dotted, root = path.stem, path.parent
    while (root / "__init__.py").exists():
        dotted, root = f"{root.name}.{dotted}", root.parent
    sys.path.insert(0, str(root))
    if "." in dotted:
        return importlib.import_module(dotted)
    spec = importlib.util.spec_from_file_location(dotted, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[dotted] = module
    spec.loader.exec_module(module)
    return module


def find_kernel(module: ModuleType, name: str) -> tuple[Any, Any]:
    """(the function under its decorators, its first autotune configuration or None)."""
    found = getattr(module, name, None)
    function, configuration = unwrapped(found)
    if function is None:
        kernels = [key for key, value in vars(module).items() if unwrapped(value)[0] is not None]
        near = nearest(name, kernels) if kernels else []
        what = "no such name" if found is None else "not a Triton or Gluon kernel"
        listed = f"; nearest: {', '.join(near)}" if near else "; the module has no kernel"
        raise RequestError(f"{name}: {what} in {module.__name__}{listed}")
    return function, configuration


def unwrapped(value: Any) -> tuple[Any, Any]:
    """A kernel without autotune and heuristics, and autotune's first configuration."""
    configuration = None
    while value is not None and not isinstance(value, JITFunction):
        configurations = getattr(value, "configs", None)
        if configurations and configuration is None:
            configuration = configurations[0]
        value = getattr(value, "fn", None) if hasattr(value, "arg_names") else None
    return value, configuration


def evaluate(name: str, text: str, module: ModuleType) -> Any:
    """A literal, else an expression in the kernel's module, else a bare word as a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        pass
    try:
        return eval(text, dict(vars(module)))
    except Exception as error:
        if isinstance(error, NameError) and text.isidentifier():
            return text
        raise RequestError(f"constant {name}: {text!r} has no value here: {error}") from error


def fit(
    request: KernelRequest, function: Any, configuration: Any, module: ModuleType
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], Any], list[str]]:
    """(signature, constants, attributes, what was taken for granted) of a launch."""
    names = [parameter.name for parameter in function.params]
    by_name = {one.parameter: one for one in request.arguments if one.parameter is not None}
    for name in (*by_name, *request.constants):
        if name not in names:
            raise RequestError(
                f"{function.__name__} has no parameter {name!r}; it has {', '.join(names)}"
            )
    for name in by_name:
        if name in request.constants:
            raise RequestError(f"{name} is given a type and, as a constant, a value")
    tuned = dict(configuration.kwargs) if configuration is not None else {}
    waiting = [one for one in request.arguments if one.parameter is None]
    given = len(waiting)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    missing_types, missing_values, granted = [], [], []
    for number, parameter in enumerate(function.params):
        name = parameter.name
        if name in request.constants:
            constants[name] = evaluate(name, request.constants[name], module)
        elif parameter.is_constexpr or (name in tuned and name not in by_name):
            if name in tuned:
                constants[name] = tuned[name]
                granted.append(f"{name}={tuned[name]!r} (first autotune configuration)")
            elif parameter.has_default:
                constants[name] = parameter.default
            else:
                missing_values.append(name)
        else:
            argument = by_name.get(name) or (waiting.pop(0) if waiting else annotated(parameter))
            if argument is not None:
                signature[name] = argument.type
                if argument.divisible_by_16:
                    attributes[(number,)] = [["tt.divisibility", 16]]
            elif parameter.has_default and parameter.default is None:
                constants[name] = None
                granted.append(f"{name}=None (its default)")
            else:
                missing_types.append(name)
    problems = []
    if missing_types:
        problems.append(f"no type in --signature for {', '.join(missing_types)}")
    if missing_values:
        problems.append(f"no --constant for {', '.join(missing_values)}")
    if waiting:
        problems.append(
            f"--signature has {given} types in order for {given - len(waiting)} arguments"
        )
    if problems:
        raise RequestError(f"{function.__name__}({', '.join(names)}): {'; '.join(problems)}")
    signature.update(dict.fromkeys(constants, "constexpr"))
    return {name: signature[name] for name in names}, constants, attributes, granted


def annotated(parameter: Any) -> ArgumentType | None:
    """The type that a parameter declares itself, as in `n: "i32"`."""
    kind = parameter.annotation_type
    return ArgumentType(parameter.name, kind, kind.startswith("*")) if kind else None


def compile_one(request: KernelRequest) -> dict[str, Any]:
    """The kernel's figures and a note, for `compiled.json`."""
    driver = OfflineDriver(request.arch)
    triton.runtime.driver.set_active(driver)  # some modules ask for the chip when imported
    module = load_module(request.module)
    function, configuration = find_kernel(module, request.kernel)
    signature, constants, attributes, granted = fit(request, function, configuration, module)
    options = {}
    for name in ("num_warps", "num_stages"):
        asked = getattr(request, name)
        tuned = getattr(configuration, name, None)
        if asked is None and tuned is not None:
            granted.append(f"{name}={tuned} (first autotune configuration)")
        if (value := asked if asked is not None else tuned) is not None:
            options[name] = value
    function.create_binder()
    source = function.ASTSource(
        fn=function, constexprs=constants, signature=signature, attrs=attributes
    )
    compiled = triton.compile(  # type: ignore[no-untyped-call]
        source, target=GPUTarget("cuda", driver.capability, 32), options=options
    )
    metadata = compiled.metadata._asdict()
    most = driver.facts.shared_bytes_per_block
    if metadata["shared"] > most:
        raise RequestError(
            f"out of resource: shared memory, required: {metadata['shared']}, "
            f"hardware limit: {most}; fewer num_stages or smaller tiles may help"
        )
    kernel = {
        "name": metadata["name"],
        "threads": metadata["num_warps"] * 32,
        "shared_bytes": metadata["shared"],
        "grid": [],
        "ptx": compiled.asm.get("ptx", ""),
        "options": ptxas_options(metadata),
        **read_cubin(compiled.asm["cubin"]),
    }
    return {"kernel": kernel, "note": ", ".join(granted)}


def in_a_line(error: BaseException) -> str:
    """What went wrong, by the line of a long message that says so."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "fatal" in line or "error:" in line.lower()]
    # a compiler shows the source with a caret below; what it means stands last
    line = telling[0] if telling else (lines[-1] if lines else "no message")
    return line if isinstance(error, RequestError) else f"{type(error).__name__}: {line}"


def main(folder: Path) -> None:
    request = request_from(json.loads((folder / "request.json").read_text()))
    try:
        answer = compile_one(request)
    except Exception as error:  # the module's and the compiler's: all of them are the user's to see
        answer = {"error": in_a_line(error)}
    (folder / "compiled.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
