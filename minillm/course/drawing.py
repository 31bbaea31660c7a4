"""What figures are drawn with: plain SVG, readable in light and dark, every kind told by more than colour.

A figure asks for the reader's colour scheme, but a page may be dark where the system is light or the other way round,
and not every browser tells the figure what its page has. So a figure paints the surface it stands on.
"""

from __future__ import annotations

from html import escape

_STYLE = """
  .surface { fill: #ffffff; }
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 12px; fill: #59636e; }
  .word { font-size: 12px; }
  .mono { font: 13px ui-monospace, monospace; }
  .strong { font-weight: 600; }
  .box { fill: #f6f8fa; stroke: #59636e; }
  .lit { fill: #ddf4ff; stroke: #0969da; stroke-width: 2; }
  .warn { fill: #fff1e5; stroke: #bc4c00; stroke-width: 2; }
  .open { fill: none; stroke: #59636e; }
  .bold { fill: none; stroke: #1f2328; stroke-width: 3; }
  .absent { fill: none; stroke: #8c959f; stroke-dasharray: 5 4; }
  .done { fill: url(#hatch); stroke: #59636e; }
  .hatch { stroke: #8c959f; }
  .line { stroke: #59636e; fill: none; stroke-width: 1.5; }
  .flow { stroke: #0969da; fill: none; stroke-width: 2; }
  .heavy { stroke: #bc4c00; fill: none; stroke-width: 2; }
  .tip-line { fill: #59636e; } .tip-flow { fill: #0969da; } .tip-heavy { fill: #bc4c00; }
  @media (prefers-color-scheme: dark) {
    .surface { fill: #111111; }
    text { fill: #e6edf3; } .small { fill: #9198a1; }
    .box { fill: #212830; stroke: #9198a1; }
    .lit { fill: #10233d; stroke: #4493f8; } .warn { fill: #3b2310; stroke: #db6d28; }
    .open { stroke: #9198a1; } .bold { stroke: #e6edf3; }
    .absent, .hatch { stroke: #656c76; } .done { stroke: #9198a1; }
    .line { stroke: #9198a1; } .flow { stroke: #4493f8; } .heavy { stroke: #db6d28; }
    .tip-line { fill: #9198a1; } .tip-flow { fill: #4493f8; } .tip-heavy { fill: #db6d28; }
  }
"""
_DEFS = (
    '<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="hatch" d="M0,0 V8"/></pattern>'
    + "".join(
        f'<marker id="tip-{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="10" markerHeight="10" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="tip-{kind}" d="M0,0 L8,4 L0,8 z"/></marker>'
        for kind in ("line", "flow", "heavy")
    )
)


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """The whole file. ``title`` is what a screen reader says."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-labelledby="title">',
            f'<title id="title">{escape(title)}</title>',
            f"<style>{_STYLE}</style>",
            f"<defs>{_DEFS}</defs>",
            rect(0, 0, width, height, "surface", 12),
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "small", anchor: str = "middle") -> str:
    """kind: "small" (pale), "word" (small, not pale), "mono", "strong" or several; anchor: "start", "middle", "end"."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str = "box", radius: float = 0) -> str:
    """kind: "box", "lit", "warn", "open", "bold", "absent" (dashed), "done" (hatched) or "surface" (what a page is)."""
    corner = f' rx="{radius:g}"' if radius else ""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner}/>'


def arrow(path: str, kind: str = "line", width: float | None = None) -> str:
    """Along an SVG path. kind: "line", "flow" or "heavy"."""
    thick = f' style="stroke-width:{width:g}"' if width else ""
    return f'<path class="{kind}" d="{path}" marker-end="url(#tip-{kind})"{thick}/>'
