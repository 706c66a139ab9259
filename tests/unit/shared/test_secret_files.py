"""A secret comes from a file, and one that nobody chose is refused."""

import secrets
from pathlib import Path

import pytest

from services.errors import UserError
from services.queues import connect
from services.secret_files import read_secret
from services.settings import Addresses
from services.stack.operate.secret_folder import make_secrets


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "it is empty"),
        ("changeme", "it is a placeholder"),
        ("CHANGE_ME_please_now", "it is a placeholder"),
        ("<your redis password>", "it is a placeholder"),
        ("my-password-for-redis", "it is a placeholder"),
        ("short1", "it is shorter than 12 characters"),
        ('quoted"and\\slashed', "only letters, digits"),
    ],
)
def test_what_protects_nothing_is_refused(tmp_path: Path, value: str, why: str) -> None:
    path = tmp_path / "redis_password"
    path.write_text(f"{value}\n")
    with pytest.raises(UserError, match=why) as raised:
        read_secret(path)
    assert str(path) in str(raised.value)
    assert "openssl rand -hex 24" in str(raised.value)
    assert not value or value not in str(raised.value).replace(str(path), "")


def test_a_chosen_secret_is_read_without_its_line_end(tmp_path: Path) -> None:
    path = tmp_path / "redis_password"
    value = secrets.token_hex(24)
    path.write_text(f"{value}\n")
    assert read_secret(path) == value


def test_a_service_does_not_start_on_a_placeholder(tmp_path: Path) -> None:
    (tmp_path / "redis_password").write_text("changeme")
    with pytest.raises(UserError, match="it is a placeholder"):
        connect(Addresses(redis_url="redis://127.0.0.1:1/0", redis_password_file=tmp_path / "redis_password"))
    with pytest.raises(UserError, match="in DFLASH_REDIS_URL: it is a placeholder"):
        connect(Addresses(redis_url="redis://:changeme@127.0.0.1:1/0"))


def test_secrets_are_made_once_and_for_their_owner(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    assert make_secrets(folder) == ["redis_password", "redis_exporter.json", "grafana_password", "hf_token"]
    first = read_secret(folder / "redis_password")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert make_secrets(folder) == []
    assert read_secret(folder / "redis_password") == first
