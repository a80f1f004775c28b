"""Finds phrases that this project does not use: `python scripts/words.py [--report]`.

`words.txt` has one phrase per line, a regular expression and what to write instead. A line of a
checked file that has to contain one ends with `words: ok`. `--report` counts the findings by
package and always succeeds.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("hybridtrain", "docs", "configs", "recipes", "examples")
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
SUFFIXES = (".py", ".md", ".yaml")


def phrases() -> list[tuple[re.Pattern[str], str]]:
    """Returns the patterns of words.txt with their replacements."""
    lines = (ROOT / "scripts/words.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split(" => ") for line in lines if line.strip() and not line.startswith("#")]
    return [(re.compile(pattern.strip()), instead.strip()) for pattern, instead in pairs]


def findings(path: Path) -> Iterator[str]:
    """Yields a message for each phrase in `path`."""
    known = phrases()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for pattern, instead in known:
            found = pattern.search(line)
            if found and not line.rstrip(" ->").endswith("words: ok"):
                where = path.relative_to(ROOT)
                yield f"{where}:{number}: {found[0].strip()!r}: write {instead}"


def main() -> int:
    """Prints the findings, or with `--report` their number by package."""
    files = [ROOT / page for page in PAGES]
    files += [p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*"))]
    found = {p: list(findings(p)) for p in files if p.suffix in SUFFIXES and p.is_file()}
    if "--report" not in sys.argv[1:]:
        print("\n".join(message for messages in found.values() for message in messages))
        return int(any(found.values()))
    counts: Counter[str] = Counter()
    for path, messages in found.items():
        counts["/".join(path.relative_to(ROOT).parts[:-1][:2]) or path.name] += len(messages)
    for package, count in sorted(counts.items()):
        print(f"{count:5d} {package}")
    print(f"{sum(counts.values()):5d} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
