"""How soon a page paints and reacts on a slow line: `python -m tests.interactive nbs/crvnn` prints it for pages of the built site.

Simulated: 1.6 Mbit/s, 150 ms, a processor four times slower, files compressed as on a web server. A page is interactive
after the last task of more than 50 ms on its main thread. Times depend on the machine; bytes and tasks do much less."""
import gzip
import os
import shutil
import sys

from tests.browsing import ARGS, Quiet, serving
from tests.test_site import SITE

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
WATCH = """window.longTasks = []; window.painted = 0;
new PerformanceObserver(list => list.getEntries().forEach(e => longTasks.push(e.startTime + e.duration))).observe({type: "longtask", buffered: true});
new PerformanceObserver(list => list.getEntries().forEach(e => { if (e.name === "first-contentful-paint") painted = e.startTime; })).observe({type: "paint", buffered: true});"""


class Compressing(Quiet):
    "Serves text compressed."
    def do_GET(self):
        path = self.translate_path(self.path)
        kind = KINDS.get(os.path.splitext(path)[1])
        if kind is None or not os.path.isfile(path):
            return super().do_GET()
        with open(path, "rb") as file:
            body = gzip.compress(file.read(), mtime=0)
        self.send_response(200)
        for name, value in (("Content-Type", f"{kind}; charset=utf-8"), ("Content-Encoding", "gzip"), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def first_visit(browser, base, path, line=200_000, latency=150, slowdown=4):
    "Seconds to the first paint and until the page reacts, tasks of more than 50 ms, kilobytes in all and of scripts."
    context = browser.new_context(viewport={"width": 390, "height": 844})
    page, sizes = context.new_page(), []
    page.set_default_timeout(300_000)
    devtools, kinds = context.new_cdp_session(page), {}
    devtools.send("Network.enable")
    devtools.send("Network.emulateNetworkConditions", {"offline": False, "latency": latency, "downloadThroughput": line, "uploadThroughput": line})
    devtools.send("Emulation.setCPUThrottlingRate", {"rate": slowdown})
    devtools.on("Network.responseReceived", lambda got: kinds.update({got["requestId"]: got["type"]}))
    devtools.on("Network.loadingFinished", lambda got: sizes.append((kinds.get(got["requestId"]), got["encodedDataLength"])))
    page.add_init_script(WATCH)
    page.goto(f"{base}/{path}.html", wait_until="load")
    page.wait_for_timeout(3000)
    painted, tasks = page.evaluate("[painted, longTasks]")
    context.close()
    return {"painted": round(painted / 1000, 2), "interactive": round(max([painted, *tasks]) / 1000, 2), "long tasks": len(tasks),
            "kB": round(sum(size for _, size in sizes) / 1000), "kB of scripts": round(sum(size for kind, size in sizes if kind == "Script") / 1000)}


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright, serving(SITE, Compressing) as address:
        chromium = playwright.chromium.launch(executable_path=os.environ.get("CHROMIUM") or shutil.which("chromium"), args=ARGS)
        for name in sys.argv[1:] or ["index", "nbs/crvnn", "nbs/beam_tree", "nbs/rir"]:
            print(name, first_visit(chromium, address, name))
        chromium.close()
