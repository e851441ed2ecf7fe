"""Stands for W&B's server, which cannot be installed: takes what `wandb sync` uploads; a program, too.

The history of a run is kept as W&B's clients address it, by line.  As W&B's own server does with its client,
it tells how many lines it has, and the client goes on there.  GET / returns all runs as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789" * 4
"""A key of the form that W&B's client wants."""


class Handler(BaseHTTPRequestHandler):
    runs: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    unknown: list[str] = []  # noqa: RUF012

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer({"runs": self.runs, "unknown": self.unknown})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/graphql":
            self.answer(self.graphql(json.loads(body)))
        elif found := re.fullmatch(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", self.path):
            self.stream(found[1], json.loads(body))
            self.answer({"exitcode": None, "limits": {}})
        else:
            self.unknown.append(self.path)
            self.answer({})

    def graphql(self, request: dict[str, Any]) -> Any:
        operation = re.findall(r"(?:query|mutation)\s+(\w+)", request["query"])[:1]
        variables = request.get("variables") or {}
        if operation == ["UpsertBucket"]:
            name = variables["name"]
            run = self.runs.setdefault(name, {"history": [], "summary": {}, "posts": []})
            run["config"] = json.loads(variables.get("config") or "{}") or run.get("config")
            given = {"tags": variables.get("tags"), "group": variables.get("groupName")}
            run.update({key: value for key, value in given.items() if value})  # later calls leave them out
            project = {"id": "p", "name": variables.get("project"), "entity": {"id": "e", "name": "me"}}
            bucket = {
                "id": name, "name": name, "displayName": variables.get("displayName") or name,
                "description": None, "config": "{}", "sweepName": None, "project": project,
                "historyLineCount": len(run["history"]),
            }  # fmt: skip
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if operation == ["Run"]:
            if (run := self.runs.get(variables["name"])) is None:
                return {"data": {"project": {"run": None}}}
            found = {
                "projectId": "1", "id": variables["name"], "name": variables["name"], "displayName": "run",
                "state": "running", "config": "{}", "group": None, "jobType": None, "tags": [],
                "user": {"name": "me", "username": "me"},
                "sweepName": None, "createdAt": "2026-01-01T00:00:00", "heartbeatAt": "2026-01-01T00:00:00",
                "description": "", "notes": "", "historyLineCount": len(run["history"]),
                "systemMetrics": "{}", "summaryMetrics": "{}", "readOnly": False,
            }  # fmt: skip
            return {"data": {"project": {"run": found}}}
        if "viewer" in request["query"]:
            me = {"id": "v", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
            return {"data": {"viewer": me}}
        self.unknown += operation
        return {"data": {}}

    def stream(self, name: str, update: dict[str, Any]) -> None:
        run = self.runs[name]
        for file, part in (update.get("files") or {}).items():
            if file == "wandb-history.jsonl":
                rows = [json.loads(line) for line in part["content"]]
                run["history"][part["offset"] :] = rows
                run["posts"].append([part["offset"], len(rows)])
            elif file == "wandb-summary.json":
                run["summary"] = json.loads(part["content"][-1])
        run.update({key: update[key] for key in ("complete", "exitcode") if update.get(key) is not None})


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
        print(server.server_port, flush=True)
        server.serve_forever()
