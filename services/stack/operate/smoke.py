"""Whether an image does its work, asked in its service's own place: with its devices, mounts and limits."""

from services.errors import UserError
from services.stack.operate.engine import last_line
from services.stack.operate.inside import script
from services.stack.operate.project import Project, Role, alive, compose


def smoke_before_start(project: Project, role: Role) -> str:
    """Run the smoke check of a worker's image before its worker takes a job; returns what it said.

    Raises:
        UserError: it failed.
    """
    if role == "sglang":
        return ""  # it is asked when it serves
    device = ["cuda"] if project.cards(role) != [] else []
    command = ("run", "--rm", "--no-deps", "--no-TTY", "--entrypoint", "python", role)
    try:
        return last_line(compose(project, *command, "-c", script(f"smoke_{role}"), *device))
    except UserError as error:
        raise UserError(f"smoke check of {role} failed: {str(error).removeprefix('docker compose run: ')}") from error


def smoke_serving(project: Project, role: Role) -> str:
    """Ask every server that is up for a few tokens; returns what the last one said.

    Raises:
        UserError: one did not give them.
    """
    said = ""
    for container in alive(project, project.of_role(role)) if role == "sglang" else []:
        try:
            said = last_line(
                compose(project, "exec", "--no-TTY", container.service, "python", "-c", script("smoke_sglang"))
            )
        except UserError as error:
            raise UserError(f"smoke check of {container.name} failed: {error}") from error
    return said
