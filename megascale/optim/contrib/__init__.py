"""Update rules that few use, each a file and a card. They import only what a plug-in may."""
