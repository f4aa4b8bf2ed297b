"""Takes the README's picture of a report: `python docs/images/shoot_report.py RUN [PICTURE]`.

Renders RUN anew, shows the page in the system's headless Chromium and writes a PNG, by default
docs/images/report.png. Refuses a picture over 300 kB, which the repository does not take.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from fsdpbench.reports.cli import write_reports
from fsdpbench.reports.run import load_run

WIDTH, HEIGHT = 1400, 1640
MAX_BYTES = 300_000
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=20000",
)


def shoot(run: Path, picture: Path) -> None:
    """Write the picture of a run's report; exits with a sentence if that is not possible."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no Chromium on the PATH: apt-get install chromium")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        page = write_reports(load_run(run), Path(folder)).html
        command = [browser, *FLAGS, f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={picture.resolve()}"]
        subprocess.run([*command, page.as_uri()], check=True, timeout=180, capture_output=True)
    size = picture.stat().st_size
    if size > MAX_BYTES:
        sys.exit(f"{picture}: {size} bytes are over {MAX_BYTES}; make HEIGHT smaller")
    print(f"{picture}: {WIDTH} x {HEIGHT}, {size} bytes")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    default = Path(__file__).with_name("report.png")
    shoot(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) == 3 else default)
