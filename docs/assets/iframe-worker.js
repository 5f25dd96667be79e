// Browsers start no Worker from file://, and the search of the site needs one. This takes its place there: a hidden frame
// that runs the script. The offline plugin would fetch such a shim from the internet on every page; it looks for the
// words iframe-worker in the name of this file.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<body></body>";
      const base = new URL(url, location.href);
      this.ready = new Promise((done) => (this.frame.onload = done)).then(() => {
        const inside = (this.inside = this.frame.contentWindow);
        const load = (name) =>
          new Promise((done, failed) => {
            const script = inside.document.createElement("script");
            Object.assign(script, { src: new URL(name, base).href, onload: done, onerror: failed });
            inside.document.body.append(script);
          });
        inside.importScripts = (...names) => names.reduce((before, name) => before.then(() => load(name)), Promise.resolve());
        inside.postMessage = (data) => {
          const event = new MessageEvent("message", { data });
          this.dispatchEvent(event);
          if (this.onmessage) this.onmessage(event);
        };
        return load(base.href);
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
