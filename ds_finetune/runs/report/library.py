"""The plot library that comes with this package: Apache ECharts, which draws in the reader's browser.

`assets/` holds one file of its npm package with the licences of what is in it. `scripts/plot_library.py` replaces them.
"""

from pathlib import Path

ECHARTS_VERSION = "6.1.0"
ECHARTS_SHA256 = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"
"""Digest of `dist/echarts.min.js` in the npm package of that version."""
ASSETS = Path(__file__).parent / "assets"
ECHARTS = ASSETS / "echarts.min.js"


def echarts_source() -> str:
    """The JavaScript of the library, which defines the global `echarts`."""
    return ECHARTS.read_text(encoding="utf-8")
