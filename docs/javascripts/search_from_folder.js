/* Search without a server: browsers start no workers from files, so the search's script runs in a hidden frame.

   `search/search_index.js`, which the theme loads then, is written by docs/hooks/manual.py. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      // What the script posts is for this page, not for its own window.
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = () => {}; // of other languages' stemmers
      const script = inside.document.createElement("script");
      this.ready = new Promise((done) => (script.onload = done));
      script.src = new URL(url, location.href);
      inside.document.body.append(script);
      this.inside = inside;
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
