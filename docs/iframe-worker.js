// A page that was opened from disk may not start a Worker, so its search runs in a hidden frame instead. The theme's search knows
// the name IFrameWorker. The plugin `offline` would load such a class from another site; readers without a network have this one.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.inside = new Promise((resolve) => {
        frame.addEventListener("load", () => resolve(this.run(frame, url)), { once: true })
      })
      document.body.append(frame)
    }

    run(frame, url) {
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = new URL(url, location)
      return new Promise((resolve) => {
        script.addEventListener("load", () => resolve(inside))
        frame.contentDocument.body.append(script)
      })
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}
