"""Settings of LMI and TGI containers for `serve`: serving.properties, archives, variables."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from lmi_bench.analysis.model.builtin_profiles import prior_of_engine
from lmi_bench.catalog.tables import read_rows
from lmi_bench.core.errors import InputError
from lmi_bench.deploy.bundle import PROPERTIES, unpack_properties
from lmi_bench.deploy.bundled_engine import BundledSettings, bundled_settings
from lmi_bench.deploy.checks import NEWEST, check_settings, container_for, container_of
from lmi_bench.deploy.option_table import effective_settings, untranslated_variables
from lmi_bench.deploy.properties import parse_properties, read_properties
from lmi_bench.models.folder import is_model_folder
from lmi_bench.targets.profiles import SHIPPED


def load_properties(path: Path) -> dict[str, str]:
    """Keys and values of a file, of a folder's serving.properties, or of an archive's."""
    if path.is_dir():
        return read_properties(path / PROPERTIES)
    if path.name.endswith((".tar.gz", ".tgz")):
        return parse_properties(unpack_properties(path), source=f"{path}:{PROPERTIES}")
    return read_properties(path)


def model_py_of(path: Path | None) -> Path | None:
    """The model.py beside a serving.properties: a container would run it."""
    if path is None or path.name.endswith((".tar.gz", ".tgz")):
        return None
    beside = (path if path.is_dir() else path.parent) / "model.py"
    return beside if beside.is_file() else None


def read_serving_file(
    path: Path | None,
    environ: Mapping[str, str],
    *,
    simulated: bool,
    note: Callable[[str], None],
    djl_version: str | None,
) -> BundledSettings:
    """The settings of `serve`; `note` is called with the origin of each value and each trap.

    djl_version  None: the newest in which all that the file says has an effect
    Raises InputError for a name or a value that containers refuse, for what the bundled engine
    refuses, and if the model is neither named nor beside the file.
    """
    source = "the environment" if path is None else str(path)
    properties = {} if path is None else load_properties(path)
    if djl_version is None:
        newest = effective_settings(properties, environ, source=source)
        djl_version = container_for({name: setting.value for name, setting in newest.items()})
        if djl_version != NEWEST:
            note(f"read as djl-serving {djl_version} does, which the file is for (--djl-version)")
    era, vllm = container_of(djl_version)
    settings = effective_settings(properties, environ, source=source, era=era)
    values = {name: setting.value for name, setting in settings.items()}
    verdict = check_settings(values, era=era, vllm=vllm)
    verdict.raise_mistakes(source)
    found = bundled_settings(settings, simulated=simulated, era=era)
    profile = _profile_of(vllm) if simulated and found.lmi_replies == "async" else None
    if profile is not None:
        found = replace(found, engine={"profile": profile, **found.engine})
    for name, setting in settings.items():
        if setting.origin != source:
            note(f"{name}={setting.value} from the environment ({setting.origin})")
    streams = {None: "", True: ", always in lines", False: ", never streamed"}[found.lmi_streams]
    note(f"batching: {found.batching}; answers of the LMI routes: {found.lmi_replies}{streams}")
    for line in found.notes:
        note(line)
    for trap in verdict.traps:
        note(f"in a container of djl-serving {djl_version}: {trap}")
    if found.ignored:
        note(f"without effect on the bundled engine: {', '.join(found.ignored)}")
    for name in untranslated_variables(environ):
        note(f"{name} is set, but LMI containers do not read it (option.max_model_len is theirs)")
    return replace(found, model=_model_of(found, path, simulated=simulated))


def _profile_of(vllm: str) -> str | None:
    """The shipped profile nearest to a version of vLLM; None if none is near."""
    if not vllm:
        return None
    prior = prior_of_engine(f"vllm {vllm}", models=(), accelerators=(), open_loop=False)
    return next((name for name, shipped in SHIPPED.items() if shipped.label == prior.label), None)


def _model_of(found: BundledSettings, path: Path | None, *, simulated: bool) -> str | None:
    if found.model is not None and "://" in found.model and not simulated:
        raise InputError(
            f"option.model_id={found.model}: this command downloads nothing; copy the weights "
            "into a folder and name it, or give --model"
        )
    if found.model is None and path is not None:
        beside = path if path.is_dir() else path.parent
        if is_model_folder(beside):
            return str(beside)
    return found.model


def limits_from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Engine settings by name, each with TGI's variable and its value.

    An empty variable counts as absent. Raises InputError for a value that is not a whole number
    above 0, and if both variables for the maximum prompt length are set.
    """
    found: dict[str, tuple[str, int]] = {}
    for row in read_rows("tgi_limits.csv", "jobs"):  # MAX_INPUT_LENGTH is the older name
        variable, setting = row["variable"], row["setting"]
        text = environ.get(variable, "").strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) < 1:
            raise InputError(f"{variable}={text} in the environment: expected a whole number above 0")
        if setting in found:
            raise InputError(f"{found[setting][0]} and {variable} are both set, and mean the same: unset one")
        found[setting] = (variable, int(text))
    return found
