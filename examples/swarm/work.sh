# The work of one message, the same on both sides: note that it was done, on the disk, and answer.
name=$(printf '%s\n' "$2" | sed -n 's/.*"content": "\([^"]*\)".*/\1/p')
echo "$name" >> "$1"
echo "done $name"
