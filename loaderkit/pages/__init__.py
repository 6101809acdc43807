"""Results as pages: one HTML file each, which needs no network and no other file.

In reading order:

    document    ``Page``: a title, sections, tables; ``HasPage`` writes it to a file
    charts      pictures for a page: curves, areas, histograms, bars
    scales      where the ticks of an axis are, and what is written beside them
    labels      which labels of a chart have room beside each other
    provenance  when, where and with which versions a page was made

A page is SVG for the lines and HTML for the words: words keep their size from 400 to
1,400 pixels, can be searched and copied, and a page without its script still says
everything.  The script only moves the cursor of a chart.  Libraries that draw were
compared in ``docs/explanation/pictures.md``.
"""
