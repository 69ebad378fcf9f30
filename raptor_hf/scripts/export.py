"""`raptor-hf export DIR RELEASE`: a folder that may be published, from what `save_model` or a checkpoint wrote.

Only the files of an allow-list are taken along, and each is searched for paths, tokens, names and fields of the run.
Exit code 0: RELEASE is written. 2: nothing is, and the message says why. A card that lies in RELEASE keeps the text
outside the package's section.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

__all__ = ["main", "make_parser"]


def make_parser() -> argparse.ArgumentParser:
    """The parser of the command's flags; their names are those of `export_release` and `CardOptions`."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="raptor-hf export", description=description, epilog=epilog, allow_abbrev=False
    )
    parser.add_argument("directory", metavar="DIR", help="a folder with an adapter and its statement")
    parser.add_argument("release", metavar="RELEASE", help="the folder to write: new, empty or an earlier release")
    parser.add_argument("--base-model", metavar="ID", help="Hub id of the base model, where a local folder was trained")
    parser.add_argument("--base-revision", metavar="REV", help="its commit, tag or branch (default: the one trained)")
    parser.add_argument("--labels", nargs="+", metavar="NAME", help="names of the classes, in order: they get public")
    parser.add_argument("--repo-id", metavar="OWNER/NAME", help="where it will live, for the card's examples")
    card = parser.add_argument_group("the card")
    card.add_argument("--license", help="licence in the metadata, e.g. apache-2.0")
    card.add_argument("--language", nargs="+", metavar="CODE", help="languages in the metadata, e.g. en")
    card.add_argument("--tags", nargs="+", metavar="TAG", help="further tags")
    card.add_argument("--datasets", nargs="+", metavar="ID", help="Hub ids of public data sets; not the private one")
    card.add_argument("--metrics", nargs="+", type=_metric, metavar="NAME=VALUE", help="results that may be published")
    card.add_argument("--metrics-dataset", metavar="TEXT", help="the data they were computed on")
    card.add_argument("--layer-choice", metavar="TEXT", help="how the protected layer was chosen")
    card.add_argument("--tuning", metavar="TEXT", help="how the hyper-parameters were chosen")
    card.add_argument("--notes", metavar="TEXT", help="any more text")
    return parser


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    if not name.strip() or not math.isfinite(float(value)):
        raise ValueError(text)
    return name.strip(), float(value)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the release. Raises `ReleaseError`, with nothing written, for what must not be published."""
    args = vars(make_parser().parse_args(argv))
    from raptor_hf.hub.contents import STATEMENT
    from raptor_hf.hub.release import export_release
    from raptor_hf.privacy.statement import PrivacyStatement

    directory, release = args.pop("directory"), args.pop("release")
    given = {name: value for name, value in args.items() if value is not None}
    if "metrics" in given:
        given["metrics"] = dict(given["metrics"])
    folder = export_release(directory, release, **given)
    statement = PrivacyStatement.from_json((folder / STATEMENT).read_text(encoding="utf-8"))
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(statement.verdict)
    print(f"next: raptor-hf verify {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
