"""One self-contained HTML page that tells a run's story: `page.render(gather(run))`.

`columns`, `rows` and `numbers` fold any number of steps into a bounded number of columns, `story`
gathers what the page needs, `verdict` and `tables` find the words, `timeline`, `heat`, `ranks`,
`close_look` and `host` describe the plots, `page` puts all of it into HTML.
"""
