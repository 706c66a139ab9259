"""The demo's materials for `compose.cpu.yaml`: a configuration with the containers' paths, and an `.env`."""

from pathlib import Path

import yaml

from services.errors import UserError
from services.settings import Settings, check_settings
from services.stack.demo.materials import fetch_prompts, make_corpus, make_target
from services.stack.demo.processes import processes_in
from services.stack.operate.secret_folder import make_secrets

# Where compose.services.yaml mounts MODEL_DIR and DATA_DIR.
MODEL_IN_CONTAINER = Path("/model")
DATA_IN_CONTAINER = Path("/data")


def put_materials_in_place(settings: Settings, folder: Path) -> None:
    """Fetch prompts, convert the target, tokenize the existing corpus; what is there is kept."""
    data, downloads = folder / "data", folder / "downloads"
    with processes_in(folder) as processes:
        fetch_prompts(data, downloads)
        make_target(settings.target.path, downloads, processes)
        if settings.merge.base is not None:
            make_corpus(data / "corpus.jsonl", settings.target.path, settings.merge.base, processes)


def settings_in_containers(settings: Settings, folder: Path) -> Settings:
    """The same settings with the paths under which the containers see the files of `folder`."""
    data = folder / "data"
    content = settings.model_dump(mode="json")
    content["target"]["path"] = str(MODEL_IN_CONTAINER)
    for source in content["sources"]:
        source["files"] = [_in_container(Path(file), data) for file in source["files"]]
    if content["merge"]["base"] is not None:
        content["merge"]["base"] = _in_container(Path(content["merge"]["base"]), data)
    return check_settings(content, where="the demo's configuration in containers")


def write_stack_files(settings: Settings, folder: Path, env_file: Path) -> None:
    """Write the containers' configuration into `folder`, and `env_file` with its secrets unless it is there."""
    config = folder / "stack.yaml"
    content = settings_in_containers(settings, folder).model_dump(mode="json")
    config.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    if env_file.exists():
        return
    secrets = env_file.with_name("secrets").resolve()
    make_secrets(secrets)
    variables = {
        "COMPOSE_FILE": "compose.cpu.yaml",
        "COMPOSE_PROFILES": "generate,train",
        "SECRETS_DIR": secrets,
        "MODEL_DIR": settings.target.path.resolve(),
        "SERVED_NAME": settings.target.served_name,
        "DATA_DIR": (folder / "data").resolve(),
        "CONFIG_FILE": config.resolve(),
    }
    env_file.write_text("".join(f"{name}={value}\n" for name, value in variables.items()), encoding="utf-8")


def _in_container(path: Path, data: Path) -> str:
    try:
        return str(DATA_IN_CONTAINER / path.resolve().relative_to(data.resolve()))
    except ValueError:
        raise UserError(f"{path} is not under {data}, which is all that the containers see; move it there") from None
