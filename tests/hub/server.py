"""A small Hub on the loopback interface: the endpoints that `huggingface_hub` uses, in memory, with injected failures.

Every byte that a client sends is kept (`uploads`), so that a test can look for what must not be there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "loopback-token"


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repo:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        content = b"".join(name.encode() + git_oid(data).encode() for name, data in sorted(files.items()))
        sha = hashlib.sha1(content + str(len(self.commits)).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = dict(files), sha
        self.messages.append(message)
        return sha

    def sha(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Failure:
    """The next `times` requests that match fail: `how` is a status, "drop", "drop-after" or "slow"."""

    method: str
    path: str
    how: int | str
    times: int = 1


class LoopbackHub:
    """`with LoopbackHub() as hub:` serves at `hub.url`."""

    def __init__(self):
        self.repos: dict[str, Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.uploads: list[bytes] = []
        self.requests: list[tuple[str, str]] = []
        self.failures: list[Failure] = []
        self.before_commit = None
        self.lock = threading.RLock()

    def __enter__(self) -> LoopbackHub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def put(self, repo_id: str, files: dict[str, bytes], private: bool = False) -> str:
        """A repository that is there already."""
        repo = self.repos.setdefault(repo_id, Repo(private))
        return repo.commit("main", files, "put")

    def files(self, repo_id: str, branch: str = "main") -> dict[str, bytes]:
        repo = self.repos[repo_id]
        return repo.commits[repo.branches[branch]]

    def fail(self, method: str, path: str, how: int | str, times: int = 1) -> None:
        self.failures.append(Failure(method, path, how, times))

    def count(self, method: str, path: str) -> int:
        return sum(m == method and re.search(path, p) is not None for m, p in self.requests)


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._serve("GET")

    def do_HEAD(self):
        self._serve("HEAD")

    def do_POST(self):
        self._serve("POST")

    def do_PUT(self):
        self._serve("PUT")

    def _serve(self, method: str) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        how = None
        with self.hub.lock:
            self.hub.requests.append((method, path))
            if body:
                self.hub.uploads.append(body)
            for failure in self.hub.failures:
                if failure.times and failure.method == method and re.search(failure.path, path):
                    failure.times -= 1
                    how = failure.how
                    break
        if how == "slow":
            time.sleep(0.5)
        elif how == "drop":
            self.close_connection = True
            self.connection.close()
            return
        elif isinstance(how, int):
            self._json(how, {"error": f"injected {how}"})
            return
        with self.hub.lock:
            status, answer, headers = self._route(method, path, body)
        if how == "drop-after":
            self.close_connection = True
            self.connection.close()
            return
        if isinstance(answer, bytes):
            self._send(status, answer, headers)
        else:
            self._json(status, answer, headers)

    def _json(self, status: int, value, headers=None) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # ---- endpoints ----

    @property
    def _user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _route(self, method: str, path: str, body: bytes):
        hub = self.hub
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if path == "/api/whoami-v2":
            return (200, {"name": "tester", "type": "user", "orgs": []}, {}) if self._user else (401, {}, {})
        if match := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            if hashlib.sha256(body).hexdigest() != match[1]:
                return 400, {"error": "hash"}, {}
            hub.lfs[match[1]] = body
            return 200, {}, {}
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = []
            for entry in json.loads(body)["objects"]:
                found = {"oid": entry["oid"], "size": entry["size"]}
                if entry["oid"] not in hub.lfs:
                    found["actions"] = {"upload": {"href": f"{hub.url}/lfs/{entry['oid']}"}}
                objects.append(found)
            return 200, {"transfer": "basic", "objects": objects}, {}
        if match := re.fullmatch(r"/(?:api/models/)?([\w.-]+/[\w.-]+?)(?:/(\w+)(?:/([^/]+)(?:/(.+))?)?)?", path):
            repo_id, action, revision, rest = match.groups()
            repo = hub.repos.get(repo_id)
            if repo is None or (repo.private and not self._user):
                return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
            if method == "POST" and not self._user:
                return 401, {"error": "Invalid credentials"}, {}
            return self._repo(method, repo_id, repo, action, revision or "main", rest, body)
        return 404, {"error": "no such endpoint"}, {}

    def _create(self, wanted: dict):
        if not self._user:
            return 401, {"error": "Invalid credentials"}, {}
        repo_id = f"{wanted.get('organization') or 'tester'}/{wanted['name']}"
        answer = {"url": f"{self.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}
        if repo_id in self.hub.repos:
            return 409, {"error": "You already created this model repo", **answer}, {}
        private = wanted.get("private") or wanted.get("visibility") == "private"
        self.hub.repos[repo_id] = Repo(bool(private))
        self.hub.repos[repo_id].commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return 200, answer, {}

    def _repo(self, method: str, repo_id: str, repo: Repo, action, revision: str, rest, body: bytes):
        if action == "branch":
            if revision in repo.branches:
                return 409, {"error": "Reference already exists"}, {}
            repo.branches[revision] = repo.branches["main"]
            return 200, {}, {}
        sha = repo.sha(revision)
        if sha is None:
            return 404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"}
        files = repo.commits[sha]
        if action in (None, "revision"):
            siblings = [{"rfilename": name} for name in files]
            return 200, {"id": repo_id, "modelId": repo_id, "sha": sha, "private": repo.private, "tags": [],
                         "siblings": siblings, "downloads": 0, "likes": 0}, {}  # fmt: skip
        if action == "commits":
            order = list(repo.commits)
            return 200, [{"id": c, "title": "t", "message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
                         for c in reversed(order[: order.index(sha) + 1])], {}  # fmt: skip
        if action == "tree":
            return 200, [{"type": "file", "path": n, "size": len(d), "oid": git_oid(d)} for n, d in files.items()], {}
        if action == "resolve":
            if rest not in files:
                return 404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
            data = files[rest]
            return 200, data, {"ETag": f'"{git_oid(data)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if action == "preupload":
            return 200, {"files": [self._mode(entry, files) for entry in json.loads(body)["files"]]}, {}
        if action == "commit" and method == "POST":
            return self._commit(repo_id, repo, revision, body)
        return 404, {"error": f"no endpoint {action}"}, {}

    def _mode(self, entry: dict, files: dict[str, bytes]) -> dict:
        mode = "lfs" if entry["path"].endswith(".safetensors") else "regular"
        found = {"path": entry["path"], "uploadMode": mode, "shouldIgnore": False}
        if entry["path"] in files:
            data = files[entry["path"]]
            found["oid"] = hashlib.sha256(data).hexdigest() if mode == "lfs" else git_oid(data)
        return found

    def _commit(self, repo_id: str, repo: Repo, branch: str, body: bytes):
        if self.hub.before_commit is not None:
            hook, self.hub.before_commit = self.hub.before_commit, None
            hook()
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        if header.get("parentCommit") not in (None, repo.sha(branch)):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}, {}
        files = dict(repo.commits[repo.branches[branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        sha = repo.commit(branch, files, header["summary"])
        return 200, {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}", "commitOid": sha}, {}
