"""Keeps the copies the same: the scripts repeat code on purpose, and one name stands for one text.

    python tests/copies.py                    # tells what differs; exit code 1 if anything does
    python tests/copies.py --from ppo.py      # copies ppo.py's version over those of the others

The law is for every *.py at the top level and for envs/batched.py:
- A top-level function, class or constant that has the same name in two files is the same text in both,
  character for character, with its decorators, its comments and those directly above it.
- A class may leave out methods and constants that its file does not need: of two classes with one name, the
  head (with the docstring) is the same text, and every part of the body that both have.
- DIFFERENT lists the names that differ on purpose. A name that has become the same in all files must leave
  the list.
- A script at the top level imports no other script and no folder of the project, so that it runs copied alone
  into an empty folder.
"""

import argparse
import ast
import difflib
import re
import sys
from pathlib import Path

DIFFERENT = {
    "Args": "each script has its own flags",
    "FirstArgs": "each script has its own flags",
    "SampleArgs": "each script has its own flags",
    "LearningArgs": "each script has its own flags",
    "MeasuringArgs": "each script has its own flags",
    "PLOTS": "each script has its own figures",
    "RANGES": "each script has its own flags",
    "check_flags": "each script refuses what its own flags cannot mean",
    "main": "each script runs its own experiment",
    "Run": "each script runs its own experiment",
    "train": "each script runs its own experiment",
    "update": "each script learns something else",
    "rollout": "each script needs other things of a step",
    "Table": "other players sit at the tables of each script",
    "log_update": "each script has its own figures",
    "record_episode": "each script shows its own players",
    "evaluate": "each script measures its own players",
    "report": "each script tells of its own experiment",
    "adapt": "each script seats its own players",
    "OF_TRAINING": "each script has its own flags",
}
SHARED = Path("envs") / "batched.py"  # not at the top level, but under the same law
LONGEST_DIFF = 24  # lines


class Source:
    """One file: its lines, and where each of its parts is.

    A part is what a top-level statement defines; of a class it is the head, with the docstring, and then each
    definition in the body, as `Class.name`.
    """

    def __init__(self, path, name):
        self.path, self.name = path, name
        raw = path.read_bytes()
        self.tree = ast.parse(raw, filename=name)
        self.lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", raw.decode("utf-8"))
        self.spans = {}  # part -> [(first line, line after the last), ...], counted from 0
        self.classes = {}  # class -> the span of all of it
        for node in self.tree.body:
            first, after = self.span(node)
            if isinstance(node, ast.ClassDef) and node.body[0].lineno > node.lineno:
                self.classes[node.name] = first, after
                after = self.read_body(node)
            for defined in defined_names(node):
                self.spans.setdefault(defined, []).append((first, after))

    def read_body(self, node):
        """Finds the parts of a class's body. -> the line after its head"""
        body = list(node.body)
        head_end = body.pop(0).end_lineno if ast.get_docstring(node) is not None else self.span(body[0])[0]
        for member, following in zip(body, body[1:] + [None]):
            first, after = self.span(member)
            if isinstance(following, ast.Expr):  # the text under a constant that tells what it is
                after = following.end_lineno
            for defined in defined_names(member):
                self.spans.setdefault(f"{node.name}.{defined}", []).append((first, after))
        return head_end

    def span(self, node):
        """The lines of a statement with its decorators and the comment lines directly above."""
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in [node, *decorators]) - 1
        indent = " " * node.col_offset
        while first > 0 and self.lines[first - 1].startswith(indent + "#"):
            first -= 1
        return first, node.end_lineno

    def text(self, part, whole=False):
        """The text of a part, or of a whole class, with line ends as on Linux wherever it was written."""
        span = self.classes.get(part, self.spans[part][0]) if whole else self.spans[part][0]
        return "".join(re.sub(r"\r\n?", "\n", line) for line in self.lines[slice(*span)]).rstrip("\n")

    def names_at(self, span):
        return {name for name, spans in self.spans.items() if span in spans}


def defined_names(node):
    """The names that a statement defines as a function, a class or a constant."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]
    if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return []
    return list(dict.fromkeys(name.id for target in targets for name in ast.walk(target)
                              if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)))


def read_sources(root):
    """The files under the law, as (sources, faults of those that are no Python)."""
    paths = sorted(root.glob("*.py")) + [path for path in [root / SHARED] if path.is_file()]
    sources, faults = [], []
    for path in paths:
        name = path.relative_to(root).as_posix()
        try:
            sources.append(Source(path, name))
        except (SyntaxError, UnicodeDecodeError, ValueError) as error:
            faults.append(f"{name} cannot be read: {error}")
    return sources, faults


def versions(name, sources, whole=False):
    """The texts of a part, or of a whole class, and the files that hold each: {text: [source, ...]}."""
    groups = {}
    for source in sources:
        if name in source.spans:
            groups.setdefault(source.text(name, whole), []).append(source)
    return groups


def drift_faults(sources, different):
    """What the files say differently about a name, and what they should, but do not."""
    faults = []
    for source in sources:
        for name, spans in source.spans.items():
            if len(spans) > 1:
                lines = ", ".join(str(first + 1) for first, _ in spans)
                faults.append(f"{source.name} defines {name} {len(spans)} times (lines {lines}): one is enough")
    for name in sorted({name for source in sources for name in source.spans}):
        groups = versions(name, sources, whole=name in different)
        holders = sum(map(len, groups.values()))
        if name.split(".")[0] in different:
            if name in different and holders > 1 and len(groups) == 1:
                faults.append(f"{name} is the same in all {holders} files that define it: take it out of "
                              f"DIFFERENT ({different[name]!r})")
        elif len(groups) > 1:
            faults.append(drift_report(name, groups))
    return faults


def drift_report(name, groups):
    """Who holds which version of a name, and how each version differs from the most common one."""
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    lines = [f"{name} has {len(groups)} versions"]
    for number, (_, holders) in enumerate(ordered, start=1):
        lines.append(f"  version {number}: {', '.join(source.name for source in holders)}")
    common, holders = ordered[0]
    for text, others in ordered[1:]:
        diff = list(difflib.unified_diff(common.split("\n"), text.split("\n"), holders[0].name,
                                         others[0].name, lineterm="", n=1))
        more = len(diff) - LONGEST_DIFF
        lines += ["  " + line for line in diff[:LONGEST_DIFF]]
        lines += [f"  ... and {more} more lines"] if more > 0 else []
    return "\n".join(lines)


def import_faults(sources, root):
    """Imports at the top level of what would not be there in an empty folder."""
    scripts = [source for source in sources if "/" not in source.name]
    folders = {path.parent.name for path in root.glob("*/*.py")}
    faults = []
    for source in scripts:
        project = folders | {path.stem for path in root.glob("*.py")} - {source.path.stem}
        for node in ast.walk(source.tree):
            for module in imported_modules(node):
                if module.startswith(".") or module.split(".")[0] in project:
                    faults.append(f"{source.name}:{node.lineno} imports {module}: a script must run alone")
    return faults


def imported_modules(node):
    """The modules that a node imports, by statement or by a call with the name written out; relative ones
    begin with a dot."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return ["." * node.level + (node.module or "")]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        function = getattr(node.func, "attr", getattr(node.func, "id", None))
        if function in ("__import__", "import_module", "run_module") and isinstance(node.args[0].value, str):
            return [node.args[0].value]
    return []


def copy_from(giver, sources, different):
    """Copies a file's version of each part over those of the others, which have it too. -> faults"""
    faults = []
    for source in sources:
        replaced = {}  # span -> (the names it defines, the giver's lines)
        for name in sorted(giver.spans.keys() & source.spans.keys()):
            if name.split(".")[0] in different or source.text(name) == giver.text(name):
                continue
            if (name in giver.classes) != (name in source.classes):
                faults.append(f"{name} cannot be copied from {giver.name} to {source.name}: it is not a class "
                              "in both")
                continue
            here, there = source.spans[name], giver.spans[name]
            if len(here) > 1 or len(there) > 1:
                continue  # drift_faults tells
            names = source.names_at(here[0])
            if names != giver.names_at(there[0]):
                faults.append(f"{name} cannot be copied from {giver.name} to {source.name}, for the same "
                              f"statement defines other names there: {', '.join(sorted(names))}")
                continue
            replaced[here[0]] = (names, giver.text(name))
        for (first, after), (_, text) in sorted(replaced.items(), reverse=True):
            end = re.search(r"[\r\n]*$", source.lines[after - 1]).group()  # nothing at the end of some files
            newline = "\r\n" if source.lines[0].endswith("\r\n") else "\n"
            source.lines[first:after] = [text.replace("\n", newline) + end]
        if replaced:
            source.path.write_bytes("".join(source.lines).encode("utf-8"))
            names = sorted(name for group, _ in replaced.values() for name in group)
            print(f"{source.name} takes from {giver.name}: {', '.join(names)}")
    return faults


def main(arguments=None, different=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="giver", metavar="SCRIPT",
                        help="copy this file's version over the others")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent,
                        help="the folder to look at (default: this project)")
    args = parser.parse_args(arguments)
    different = DIFFERENT if different is None else different
    sources, faults = read_sources(args.root)
    if args.giver is not None:
        wanted = args.giver.replace("\\", "/").removeprefix("./")
        giver = next((source for source in sources if source.name == wanted), None)
        if giver is None:
            known = ", ".join(source.name for source in sources) or "no files"
            print(f"--from {args.giver}: there are {known}", file=sys.stderr)
            return 2
        faults = copy_from(giver, sources, different)
        sources, unreadable = read_sources(args.root)
        faults += unreadable
    faults += drift_faults(sources, different) + import_faults(sources, args.root)
    if faults:
        print("\n\n".join(faults))
        return 1
    names = {name for source in sources for name in source.spans if len(versions(name, sources)) == 1}
    shared = sum(sum(name in source.spans for source in sources) > 1 for name in names)
    print(f"{len(sources)} files hold {shared} names in common, each with one text.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
