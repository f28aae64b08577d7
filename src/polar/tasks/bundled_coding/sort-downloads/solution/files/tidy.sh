#!/bin/sh
LC_ALL=C
export LC_ALL
if [ ! -d "$1" ]; then
    echo "no such folder: $1" >&2
    exit 1
fi
cd -- "$1" || exit 1
moved=0
for file in *; do
    if [ ! -f "./$file" ] || [ -L "./$file" ]; then
        continue
    fi
    case $file in
        *.)  stem=$file; dotted=; folder=other ;;
        *.*) extension=${file##*.}
             stem=${file%.*}; dotted=.$extension
             folder=$(printf '%s.' "$extension" | tr '[:upper:]' '[:lower:]'); folder=${folder%.} ;;
        *)   stem=$file; dotted=; folder=other ;;
    esac
    mkdir -p "./$folder"
    target=$file number=0
    while [ -e "./$folder/$target" ] || [ -L "./$folder/$target" ]; do
        number=$((number + 1))
        target=$stem-$number$dotted
    done
    mv "./$file" "./$folder/$target"
    moved=$((moved + 1))
done
echo "moved $moved"
