from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from kedge.encoders import build_encoder
from kedge.errors import ConfigError, ModelError
from kedge.images import Preprocessing
from kedge.model import Model

TOKEN = "hf_of_the_test"
NASTY = ("ant", "a `tick` | bar", 'new\nline\n---\n"quoted": {}', "Zebra, gestreift ≥ 2 🦓")


def make(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    encoder = build_encoder("resnet10", dim=4, stem="imagenet").eval()
    return Model(encoder, anchors=torch.randn(4, 4), classes=NASTY, preprocessing=Preprocessing(size=16))


def measured(model: Model, dataset: str = "sample") -> dict[str, Any]:
    scores = {"mAP": 0.5, "P@20": 0.25, "P@100": 0.125}
    names = ("brute_force", "label_lists", "label_lists_rest_last", "anchor_lists")
    meta = {"dataset": dataset, "model_fingerprint": model.fingerprint}
    return {**dict.fromkeys(names, scores), "accuracy": 0.75, "knn1": 0.5, "queries": 1000, "left_out": 0, "meta": meta}


# ------------------------------------------------------------------ folders


def test_a_folder_that_both_understand(tmp_path: Path) -> None:
    model, folder = make(), tmp_path / "my-model"
    (tmp_path / "metrics.json").write_text(json.dumps(measured(model, 'odd: "name"\n---\n- x')))
    model.save_pretrained(folder, metrics=tmp_path, license="apache-2.0")
    assert sorted(one.name for one in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.json",
        "weights.safetensors",
    ]
    assert [one.name for one in sorted(tmp_path.iterdir())] == ["metrics.json", "my-model"]
    for again in (Model.from_pretrained(folder, device="cpu"), Model.load(str(folder), device="cpu")):
        assert again.fingerprint == model.fingerprint
    config = json.loads((folder / "config.json").read_text())
    assert (config["architecture"], config["num_features"], config["num_classes"]) == ("resnet10", 4, 4)

    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("kedge", "image-feature-extraction")
    assert card.data.license == "apache-2.0"
    assert {"kedge", "resnet10", "cam"} <= set(card.data.tags)
    results = {one.metric_name: one.metric_value for one in card.data.eval_results}
    assert (results["mAP (brute force)"], results["P@20 (anchor lists)"], results["accuracy"]) == (0.5, 0.25, 0.75)
    assert {one.dataset_name for one in card.data.eval_results} == {'odd: "name"\n---\n- x'}
    (classes,) = re.findall(r"## Classes\n\n(.*)\n", card.text)
    assert classes.count("`") == 2 * len(NASTY)
    assert "| mAP (brute force) | 0.500 |" in card.text


def test_the_card_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    model.save_pretrained(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    for name in ("one.jpg", "two.jpg"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(name)
    (code,) = re.findall(r"```python\n(.*?)```", Path("my-model/README.md").read_text(), flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert torch.equal(scope["vectors"], model.embed(["one.jpg", "two.jpg"]))
    assert scope["name"] == model.classify("one.jpg")


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / ".gitattributes").write_text("*.safetensors filter=lfs")
    make(0).save_pretrained(tmp_path)
    make(1).save_pretrained(tmp_path)
    assert Model.from_pretrained(tmp_path, device="cpu").fingerprint == make(1).fingerprint
    assert (tmp_path / "README.md").read_text() == "mine"
    assert (tmp_path / ".gitattributes").exists()
    (tmp_path / "model.json").write_text('{"kind": "another"}')
    with pytest.raises(ModelError, match="something other"):
        make(0).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="something other"):
        make(0).save_pretrained(tmp_path / "README.md")
    assert (tmp_path / "model.json").read_text() == '{"kind": "another"}'


def test_metrics_of_another_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps(measured(make(1))))
    with pytest.raises(ConfigError, match="run kedge evaluate again"):
        make(0).save_pretrained(tmp_path / "model", metrics=tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    with pytest.raises(ConfigError, match="kedge evaluate"):
        make(0).save_pretrained(tmp_path / "model", metrics=tmp_path / "metrics.json")
    assert not (tmp_path / "model").exists()


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Model folder .* does not exist"):
        Model.from_pretrained("no-such-folder")
    with pytest.raises(ModelError, match=r"Model folder .* does not exist"):
        Model.from_pretrained(tmp_path / "user" / "name")
    with pytest.raises(ConfigError, match="user/name"):
        make().push_to_hub("just-a-name")


# ------------------------------------------------------------------ the Hub, as far as its own client asks for it


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    titles: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def commit(self, files: dict[str, bytes], title: str) -> str:
        before = self.commits[self.head] if self.commits else {}
        name = hashlib.sha1(f"{len(self.commits)} {title}".encode()).hexdigest()
        self.commits[name] = {**before, **files}
        self.titles.append(title)
        return name


class Hub(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        if path == "/api/validate-yaml":
            front = json.loads(body)["content"].split("\n---\n")[0].removeprefix("---\n")
            return self._say({"errors": [], "warnings": []} if isinstance(yaml.safe_load(front), dict) else {}, 200)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._say({"error": "Invalid username or password."}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.server.repos:
                return self._say({"error": "You already created this", "url": f"{self.server.address}/{name}"}, 409)
            hidden = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.server.repos[name] = repo = Repo(hidden)
            repo.commit({".gitattributes": b"*.safetensors filter=lfs"}, "initial commit")
            return self._say({"url": f"{self.server.address}/{name}", "id": name})
        if found := re.fullmatch(r"/(\w+/\w+)\.git/info/lfs/objects/batch", path):
            asked = json.loads(body)["objects"]
            upload = {one["oid"]: {"upload": {"href": f"{self.server.address}/lfs/{one['oid']}"}} for one in asked}
            return self._say(
                {"transfer": "basic", "objects": [{**one, "actions": upload[one["oid"]]} for one in asked]}
            )
        if found := re.fullmatch(r"/api/models/(\w+/\w+)/preupload/main", path):
            modes = {True: "lfs", False: "regular"}
            names = [one["path"] for one in json.loads(body)["files"]]
            return self._say(
                {
                    "files": [
                        {"path": name, "uploadMode": modes[name.endswith(".safetensors")], "shouldIgnore": False}
                        for name in names
                    ]
                }
            )
        if found := re.fullmatch(r"/api/models/(\w+/\w+)/commit/main", path):
            lines = [json.loads(line) for line in body.splitlines()]
            files = {}
            for line in lines:
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.server.large[value["oid"]]
            oid = self.server.repos[found[1]].commit(files, lines[0]["value"]["summary"])
            return self._say(
                {"success": True, "commitOid": oid, "commitUrl": f"{self.server.address}/{found[1]}/commit/{oid}"}
            )
        return self._say({"error": path}, 404)

    def do_PUT(self) -> None:
        oid, content = self.path.rpartition("/")[2], self._body()
        if hashlib.sha256(content).hexdigest() != oid:
            return self._say({"error": "another content"}, 400)
        self.server.large[oid] = content
        return self._say({})

    def do_GET(self) -> None:
        if self.path == "/close":
            self.server.close()
            return self._say({})
        path = self.path.partition("?")[0]
        if not (found := re.fullmatch(r"/(?:api/models/)?(\w+/\w+)/(revision|tree|resolve)/(\w+)/?(.*)", path)):
            return self._say({"error": path}, 404)
        name, what, revision, file = found.groups()
        if name == "someone/gated":
            return self._say({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
        repo = self.server.repos.get(name)
        if repo is None or (repo.private and self.headers.get("Authorization") != f"Bearer {TOKEN}"):
            return self._say({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        commit = repo.head if revision == "main" else revision
        if commit not in repo.commits:
            return self._say({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
        files = repo.commits[commit]
        if what == "revision":
            siblings = [{"rfilename": one} for one in files]
            return self._say({"id": name, "sha": commit, "private": repo.private, "tags": [], "siblings": siblings})
        if what == "tree":
            return self._say(
                [
                    {"type": "file", "path": one, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for one, content in files.items()
                ]
            )
        if file not in files:
            return self._say({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        if self.command == "GET":
            self.server.fetched.append(file)
        about = {"ETag": f'"{hashlib.sha1(files[file]).hexdigest()}"', "X-Repo-Commit": commit}
        return self._say(files[file], 200, about)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _say(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing on the terminal."""


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Hub)
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}
        self.fetched: list[str] = []
        foreign = Repo(private=False)
        foreign.commit({"config.json": b"{}"}, "another library's model")
        self.repos["someone/foreign"] = foreign

    def close(self) -> None:
        self.shutdown()
        self.server_close()


# The Hub's address is read when its client is imported: hence a process of its own, and one for all that is asked.
STEPS = """
import json, sys, urllib.request
from kedge.errors import KedgeError
from kedge.model import Model

token, said = sys.argv[1], {}

def refused(name, step, *arguments, **options):
    try:
        step(*arguments, **options)
    except KedgeError as error:
        said[name] = f"{type(error).__name__}: {error}"

load = Model.from_pretrained
first, second = Model.load("first", device="cpu"), Model.load("second", device="cpu")
refused("no token", first.push_to_hub, "me/pictures", token=False)
said["first"] = first.push_to_hub("me/pictures", token=token, private=True, metrics="metrics.json")
said["loaded"] = load("me/pictures", token=token, cache_dir="one", device="cpu").fingerprint
said["second"] = second.push_to_hub("me/pictures", token=token, commit_message="Better")
said["newer"] = load("me/pictures", token=token, cache_dir="one", device="cpu").fingerprint
old = said["first"].rpartition("/")[2]
said["older"] = load("me/pictures", token=token, revision=old, cache_dir="two", device="cpu").fingerprint
refused("private", load, "me/pictures", token=False, cache_dir="three")
refused("missing", load, "me/nothing", token=token)
refused("revision", load, "me/pictures", token=token, revision="v9")
refused("gated", load, "someone/gated")
refused("foreign", load, "someone/foreign")
urllib.request.urlopen(sys.argv[2] + "/close").read()
said["cached"] = load("me/pictures", token=token, cache_dir="one", device="cpu").fingerprint
refused("offline", load, "me/pictures", token=token, cache_dir="four")
refused("push offline", first.push_to_hub, "me/pictures", token=token)
print(json.dumps(said))
"""


@dataclass(frozen=True)
class Outcome:
    server: Server
    said: dict[str, str]
    first: Model
    second: Model


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("hub")
    first, second = make(0), make(1)
    first.save(folder / "first")
    second.save(folder / "second")
    (folder / "metrics.json").write_text(json.dumps(measured(first)))
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": server.address, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", STEPS, TOKEN, server.address],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        server.close()
        thread.join()
    assert done.returncode == 0, done.stderr
    return Outcome(server, json.loads(done.stdout.splitlines()[-1]), first, second)


def test_there_and_back(outcome: Outcome) -> None:
    said, repo = outcome.said, outcome.server.repos["me/pictures"]
    assert repo.private
    assert said["loaded"] == said["older"] == outcome.first.fingerprint
    assert said["newer"] == said["cached"] == outcome.second.fingerprint
    commits = [f"{outcome.server.address}/me/pictures/commit/{name}" for name in repo.commits]
    assert commits[1:] == [said["first"], said["second"]]  # one commit for each push
    assert repo.titles[1:] == [f"Kedge model {outcome.first.fingerprint}", "Better"]


def test_only_the_model_is_fetched(outcome: Outcome) -> None:
    head = outcome.server.repos["me/pictures"]
    assert set(head.commits[head.head]) > {"README.md", "config.json"}
    assert set(outcome.server.fetched) == {"model.json", "weights.safetensors"}


def test_the_card_on_the_hub(outcome: Outcome, tmp_path: Path) -> None:
    repo = outcome.server.repos["me/pictures"]
    first, second = (repo.commits[name]["README.md"] for name in list(repo.commits)[1:])
    assert first == second  # whatever its owner made of it since would have stayed
    (tmp_path / "README.md").write_bytes(first)
    card = huggingface_hub.ModelCard.load(tmp_path / "README.md")
    assert 'from_pretrained("me/pictures")' in card.text
    assert {one.metric_value for one in card.data.eval_results} == {0.5, 0.25, 0.75}


@pytest.mark.parametrize(
    ("step", "kind", "words"),
    [
        ("no token", "ServiceError", ["me/pictures", "token"]),
        ("private", "DownloadError", ["private", "hf auth login"]),
        ("missing", "DownloadError", ["me/nothing", "check the name"]),
        ("revision", "DownloadError", ["revision", "me/pictures"]),
        ("gated", "DownloadError", ["someone/gated", "terms"]),
        ("foreign", "ModelError", ["someone/foreign", "not a Kedge model", "model.json"]),
        ("offline", "DownloadError", ["me/pictures", "connect to the network", "pass the folder's path"]),
        ("push offline", "ServiceError", ["me/pictures", "network"]),
    ],
)
def test_one_sentence_for_what_goes_wrong(outcome: Outcome, step: str, kind: str, words: list[str]) -> None:
    said = outcome.said[step]
    assert said.startswith(kind)
    assert "\n" not in said
    assert all(word in said for word in words), said
