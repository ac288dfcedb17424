"""Chromium without a window, driven through its debugging pipe: no driver and no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time


class Browser:
    """One page; `console` keeps its errors."""

    FLAGS = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        "--force-prefers-reduced-motion",
        "--disable-background-networking",
        "--disable-dev-shm-usage",
        "--no-first-run",
    )

    def __init__(self, folder):
        self._in, answers = os.pipe()
        calls, self._out = os.pipe()

        def pipes():  # Chromium reads from descriptor 3 and writes to 4
            reading, writing = os.dup(calls), os.dup(answers)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self.process = subprocess.Popen(
            [found(), *self.FLAGS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(calls)
        os.close(answers)
        self._buffer, self._number, self.console, self._session = b"", 0, [], None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """The result of one command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._out, text) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self):
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            assert part, "Chromium ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(text)
        kind, params = answer.get("method"), answer.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.console.append(params["exceptionDetails"]["exception"].get("description"))
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.console.append(str(params["args"]))
        elif kind == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.console.append(params["entry"]["text"])
        return answer

    def js(self, code):
        """The value of an expression, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, url, width=1200, scheme="light"):
        """Load a page at a width, in a colour scheme."""
        self.show(width, scheme)
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && !!document.getElementById('main')")

    def show(self, width, scheme="light", media=""):
        """Change the width, colour scheme or medium of the open page."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def until(self, code, limit_s=10.0):
        """Wait for an expression to be true."""
        end = time.monotonic() + limit_s
        while not self.js(code):
            assert time.monotonic() < end, f"never true: {code}"
            time.sleep(0.02)

    def mouse(self, x, y):
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def key(self, key):
        """Press a key."""
        text = key if len(key) == 1 else ""
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def close(self):
        """End Chromium."""
        self.process.terminate()
        self.process.wait(120)
        os.close(self._in)
        os.close(self._out)


def found():
    """The path of a Chromium or Chrome; None where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)
